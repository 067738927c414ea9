"""How many patches and tokens a media item becomes: the only home of these formulas.

A rule is read from the JSON configs of a model folder, without torch and without the processor itself. Planner,
assigner and loader all ask the same rule, so the counts they use are one number.

Promise: equal to the Transformers processor of the same name and to the number of features the model makes, for every
size that the processor accepts; at least one patch and one token. What a processor refuses (aspect ratio, too few
frames) raises here, before training, and so does a clip that would make no token. Price: a few microseconds per image
or clip; tens of microseconds per video, a millisecond where hundreds of timestamps are counted for the first time.
"""

from entrain_opt.workload.media.anyres import AnyResolutionRule
from entrain_opt.workload.media.audio import WhisperRule
from entrain_opt.workload.media.families import media_rule
from entrain_opt.workload.media.frames import FrameSampling
from entrain_opt.workload.media.pan_and_scan import PanAndScanRule
from entrain_opt.workload.media.rule import CombinedRule, Expansion, MediaRule, MediaSize
from entrain_opt.workload.media.smart_resize import SmartResizeRule, SmartResizeVideoRule
from entrain_opt.workload.media.splits import SplitRule, TimedFrameRule
from entrain_opt.workload.media.text import TextCounter
from entrain_opt.workload.media.tiles import FixedRule, FrameSquareRule, TileRule

__all__ = [
    "AnyResolutionRule",
    "CombinedRule",
    "Expansion",
    "FixedRule",
    "FrameSampling",
    "FrameSquareRule",
    "MediaRule",
    "MediaSize",
    "PanAndScanRule",
    "SmartResizeRule",
    "SmartResizeVideoRule",
    "SplitRule",
    "TextCounter",
    "TileRule",
    "TimedFrameRule",
    "WhisperRule",
    "media_rule",
]
