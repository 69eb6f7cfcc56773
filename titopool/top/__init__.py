"""`titopool top`: a live table of a server's workers and requests.

Runs in: the terminal of an operator. Asks the server over HTTP only.
"""
