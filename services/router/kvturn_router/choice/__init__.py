"""How a turn is served: which way and which engines, by learned costs. No I/O."""
