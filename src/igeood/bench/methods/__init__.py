"""The paper's other systems, as methods of the public registry: importing this package registers them."""

from igeood.bench.methods.batch_norm import BatchNorm
from igeood.bench.methods.deconf import DeConfC
from igeood.bench.methods.gram import Gram
from igeood.bench.methods.kl import KLDivergence
from igeood.bench.methods.residual_flow import ResidualFlow
from igeood.bench.methods.sgd import IgeoodLogitsSgd

__all__ = ["BatchNorm", "DeConfC", "Gram", "IgeoodLogitsSgd", "KLDivergence", "ResidualFlow"]
