"""Discovery: the rank, local rank and world size of this process, from the variables that its launcher has set.

Pure functions of an environment: nothing is connected to, and only the standard library is imported. Every other
package of the rank library may import this one; the launcher (`flk_runtime.launcher`) may not, as it assigns the ranks.
"""

from flk_runtime.discovery.environment import discover
from flk_runtime.discovery.readers import LAUNCHERS
from flk_runtime.discovery.variables import Launcher, RankInfo

__all__ = ["LAUNCHERS", "Launcher", "RankInfo", "discover"]
