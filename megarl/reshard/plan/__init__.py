"""Plans of weight transfers: pure functions of what trainer ranks and server ranks hold."""
