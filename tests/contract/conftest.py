"""What the contract's tests share: their helpers can be imported."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `arrays` and `messages`
