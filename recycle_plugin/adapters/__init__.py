"""One package per framework, with what it lends the worker runtime. No algorithm lives here."""
