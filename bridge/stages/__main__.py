"""`python -m bridge.stages RUN STAGE ELEMENT`: run one element of a run, here and now.

Exit codes: 0 the artifact is sealed; 75 stopped early and saved, start again; anything else failed.
"""

import sys

from bridge.stages.runner import run_element

if __name__ == "__main__":
    if len(sys.argv) != 4 or not sys.argv[3].isdigit():
        sys.exit("usage: python -m bridge.stages RUN STAGE ELEMENT")
    run_element(sys.argv[1], sys.argv[2], int(sys.argv[3]))
