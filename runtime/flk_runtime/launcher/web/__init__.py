"""What a launcher serves and sends over HTTP."""
