"""Reads axolotl's YAML files of RLHF methods into megarl's configuration."""
