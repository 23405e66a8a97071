"""Analytic profiles of named models, and the costs of changes on a machine."""
