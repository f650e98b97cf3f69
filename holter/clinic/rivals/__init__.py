"""Rules of others, re-implemented from their published thresholds and scored by the same code: History -> findings."""

from __future__ import annotations

from collections.abc import Callable

from holter.clinic.rivals.absolute import absolute
from holter.clinic.rivals.autotrainer import autotrainer
from holter.clinic.rivals.karpathy import karpathy
from holter.clinic.rivals.sagemaker import sagemaker
from holter.clinic.rivals.seven_sigma import seven_sigma
from holter.clinic.rivals.umlaut import umlaut
from holter.clinic.rivals.zclip import zclip
from holter.diagnosis.finding import Finding
from holter.history import History

Rule = Callable[[History], tuple[Finding, ...]]

RIVALS: dict[str, Rule] = {
    "7-sigma norm": seven_sigma,
    "AutoTrainer": autotrainer,
    "SageMaker Debugger": sagemaker,
    "UMLAUT": umlaut,
    "Karpathy's ratio": karpathy,
    "ZClip": zclip,
    "absolute thresholds": absolute,
}
