"""What frameworks lend the worker runtime, one package for each; no algorithm lives here."""
