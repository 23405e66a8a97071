"""The simulator: programs in virtual time and with exact numbers, through the executor loop that the runtime uses."""

from __future__ import annotations

from recycle_plugin.lab.simulator.arithmetic import ExactWorld, train
from recycle_plugin.lab.simulator.predict import Prediction, predict
from recycle_plugin.lab.simulator.virtual import Conditions, Deadlock, VirtualWorld, simulate

__all__ = ["Conditions", "Deadlock", "ExactWorld", "Prediction", "VirtualWorld", "predict", "simulate", "train"]
