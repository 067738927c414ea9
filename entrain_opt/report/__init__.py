"""What a plan does, as tables and as one self-contained HTML page."""

from entrain_opt.report.bench import Bench, Trial, draw_batches

__all__ = ["Bench", "Trial", "draw_batches"]
