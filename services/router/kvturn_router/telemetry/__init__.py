"""One trace per turn, written as OTLP bytes and sent in batches."""
