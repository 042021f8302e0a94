"""Name the environment variables that connect a launch with its ranks.

Users set only TIMEOUT. The launch sets GRACE, and the supervisor the others.
`docs/distributed.md` describes them.
"""

TIMEOUT = "DISTIL_TIMEOUT"  # seconds that a rank waits for the others
HARDWARE = "DISTIL_HARDWARE"  # the preset of a launch, for the tokens/s of its plan
GRACE = "DISTIL_GRACE"  # seconds to save in after a signal
LAUNCH = "DISTIL_LAUNCH"  # name of the launch, the same on all nodes
HEARTBEATS = "DISTIL_HEARTBEATS"  # folder in which ranks report; unset without a supervisor
SUPERVISOR = "DISTIL_SUPERVISOR"  # pid of the supervisor
HEAD = "DISTIL_HEAD"  # first host of a job of Slurm, from its script
ENDS_WITH_STDIN = "DISTIL_ENDS_WITH_STDIN"  # set by a sweep, whose runs end with it
LOGS = "DISTIL_LOGS"  # folder of this attempt's logs
STORE = "DISTIL_STORE"  # file in which the ranks of a single node meet
