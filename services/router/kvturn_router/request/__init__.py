"""What a client asks: bodies, conversations and histories, checked before any engine is asked."""
