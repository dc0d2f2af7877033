"""Training state of an engine, written by any layout and read by any other layout."""
