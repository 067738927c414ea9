"""The errors a user can meet. Each message says what was expected, what was found, where, and one thing to do."""

#: Where somebody who meets a model that is not known here reads on; messages name it.
FAMILY_GUIDE = "CONTRIBUTING.md#add-a-model-family (ten steps)"


class EntrainError(Exception):
    """Base of every error this package raises on purpose."""


class WorkloadError(EntrainError):
    """The data is wrong: a missing dataset, a broken image, a placeholder without its image."""


class PlanError(EntrainError):
    """A plan is inconsistent, does not fit the cluster, or no plan exists under the given limits."""


class AssignmentError(EntrainError):
    """An assignment loses or repeats an item, breaks precedence or a memory cap."""


class ScheduleError(EntrainError):
    """A schedule repeats or omits an action, or its dependencies cannot be met."""


class SolverError(EntrainError):
    """A solver is missing, or stopped without an answer."""


class RuntimeConfigError(EntrainError):
    """The launch, recipe or model cannot be executed as configured."""


class TrainingError(EntrainError):
    """Training went wrong on every rank at once: a loss that is not finite, or ranks that disagree."""


class CheckpointError(EntrainError):
    """A checkpoint could not be written, or is missing, incomplete, damaged or of another model."""
