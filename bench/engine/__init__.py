"""What retentions cost a decode engine: CPU while it is idle, waiting while its memory is short."""
