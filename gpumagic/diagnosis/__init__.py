"""From a failure to a report, in two steps: what must be read before the release (`failure`), and what after it.

The probes measure (`evidence`), `advice` judges (`conclusion`); this package only passes the one to the other.
"""

from gpumagic.diagnosis.conclusion import conclude
from gpumagic.diagnosis.evidence import Circumstances
from gpumagic.diagnosis.failure import Failure, examine, instant, pinned, recognise

__all__ = ["Circumstances", "Failure", "conclude", "examine", "instant", "pinned", "recognise"]
