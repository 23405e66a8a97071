"""What users set: the ``"recycle"`` section of the DeepSpeed JSON (``schema``)."""
