"""Users' settings: the ``"recycle"`` section of the DeepSpeed JSON (``schema``)."""
