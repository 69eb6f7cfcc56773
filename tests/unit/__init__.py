"""No server starts here."""
