"""Subcommands of ``recycle``, a module each: it adds its arguments and runs. Heavy imports happen when it runs."""
