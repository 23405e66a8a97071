"""What users set: the ``"recycle"`` section of the DeepSpeed JSON (``schema``), and Hydra's overrides for the scripts
(``compose``).
"""
