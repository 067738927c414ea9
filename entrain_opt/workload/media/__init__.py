"""How many patches and tokens a media item becomes: the only home of these formulas.

A rule is read from the JSON configs of a model folder, without torch and without the processor itself. Planner,
assigner and loader all ask the same rule, so the counts they use are one number.

Promise: equal to the Transformers processor of the same name and to the number of features the model makes, for every
size that the processor accepts; at least one patch and one token. What a processor refuses (aspect ratio, too few
frames) raises here, before training, and so does a clip that would make no token. Price: 5 to 50 microseconds per image
or clip, 0.1 ms for LLaVA-OneVision's 36 resolutions; 0.1 to 2 ms per video, the more frames are named or timed.

To add a rule: write a `MediaRule` in a file of its own, and name its processor in `image_rules.py` or `videos.py`.
"""

from entrain_opt.workload.media.anyres import AnyResolutionRule
from entrain_opt.workload.media.audio import WhisperRule
from entrain_opt.workload.media.families import media_rule
from entrain_opt.workload.media.frames import FrameSampling
from entrain_opt.workload.media.pan_and_scan import PanAndScanRule
from entrain_opt.workload.media.patch_rows import PatchRowRule
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
    "PatchRowRule",
    "SmartResizeRule",
    "SmartResizeVideoRule",
    "SplitRule",
    "TextCounter",
    "TileRule",
    "TimedFrameRule",
    "WhisperRule",
    "media_rule",
]
