"""Subcommands of ``recycle``: each module adds its arguments and runs; what is heavy is imported when it runs."""
