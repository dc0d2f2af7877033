"""Plans of weight transfers: pure functions of HF configs and of the boxes that ranks hold."""
