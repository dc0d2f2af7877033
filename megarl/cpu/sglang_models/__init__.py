"""Models and operations that SGLang imports on CPU in place of all its model files; other models load later."""
