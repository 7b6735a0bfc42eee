from hybridflow.agents.environments.base import environment as environment
from hybridflow.agents.loops.base import agent_loop as agent_loop
from hybridflow.agents.tools.base import tool as tool
from hybridflow.algorithms.estimators.base import estimator as estimator
from hybridflow.algorithms.policy_losses.base import policy_loss as policy_loss
from hybridflow.api.run import Run as Run
from hybridflow.batch import DataProto as DataProto
from hybridflow.batch import Jagged as Jagged
from hybridflow.errors import HybridFlowError as HybridFlowError
from hybridflow.flows.base import flow as flow
from hybridflow.observe.trackers.base import tracker as tracker
from hybridflow.rewards.verifiers.base import verifier as verifier

__version__: str
