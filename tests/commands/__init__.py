"""The command `titopool`, and servers as users start and end them."""
