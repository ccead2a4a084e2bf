"""What gathers facts: all I/O of `kvturn doctor`, each question with a deadline."""
