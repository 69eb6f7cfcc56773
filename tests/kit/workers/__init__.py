"""Workers, engines and pools without a server."""
