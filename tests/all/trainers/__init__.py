"""Real trainers that learn through a server, and stock clients in every order of their calls."""
