"""The lab: what a job is studied with, and does not need.

The campaign and the worlds that it runs jobs in, peers and failure histories, experiments, analytic profiles, and the
checks of a GPU.  Nothing outside imports it; the ``recycle`` command finds its subcommands where it is installed.
"""
