"""`kvturn doctor`: facts are gathered by `probes`, judged by the modules beside it."""
