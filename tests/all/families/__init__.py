"""Models of further families, and of mechanisms that are dear to try: exactness after updates."""
