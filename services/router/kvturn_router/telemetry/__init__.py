"""One trace per turn, of those that are sampled."""
