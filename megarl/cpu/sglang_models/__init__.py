"""What SGLang imports at start instead of all of its model files; a model missing here still loads, only later."""
