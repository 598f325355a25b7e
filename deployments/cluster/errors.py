"""What can go wrong around a local cluster.

ClusterError
  InstanceBusyError      another live process owns this instance directory
  PortInUseError         the HTTP port is taken by someone else
  EnvironmentTooLateError  Ray was imported before its environment was prepared
  ServeConfigError       the Serve config has keys or values that Serve would ignore or refuse
  DeployError            an application did not come up; the message says which part and why
  ClusterDiedError       a process of Ray that nothing works without has ended
"""


class ClusterError(Exception):
    """Anything that keeps a local cluster from starting, deploying or running."""


class InstanceBusyError(ClusterError):
    """Another live process owns the instance directory."""


class PortInUseError(ClusterError):
    """A port that the instance needs is taken."""


class EnvironmentTooLateError(ClusterError):
    """Ray was imported in this process before its environment was prepared."""


class ServeConfigError(ClusterError):
    """The Serve config is not one that Serve would follow to the letter."""


class DeployError(ClusterError):
    """An application failed to start, or was not running in time."""


class ClusterDiedError(ClusterError):
    """Ray itself has ended under a running instance."""
