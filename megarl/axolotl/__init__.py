"""axolotl's YAML of its RLHF methods, read into our configuration."""
