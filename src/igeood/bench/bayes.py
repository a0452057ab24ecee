"""The paper's search for the temperature."""

from igeood.errors import MissingExtraError
from igeood.guard.tune import Attempt, Trials

RANGE = (1.0, 1000.0)  # of the temperature; this and the next two are the paper's
TRIALS = 500
SEEDS = 5


def search(attempt: Attempt, trials: Trials, n_ood: int, *, seed: int = 0) -> None:
    """Bayesian optimisation over [1, 1000]: tree-structured Parzen estimators in log T, 500 trials of each of 5 seeds.

    For `Guard.tune(search=igeood.bench.bayes.search)`; `functools.partial` gives it another first seed. It needs the
    extra `tune`.
    """
    del trials, n_ood
    try:
        import optuna  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError as error:
        problem = "Bayesian search needs optuna"
        raise MissingExtraError(problem, argument="search", cure="pip install 'igeood[tune]'") from error
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        for number in range(seed, seed + SEEDS):
            study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=number))
            study.optimize(lambda trial: attempt(trial.suggest_float("temperature", *RANGE, log=True)), TRIALS)
    finally:
        optuna.logging.set_verbosity(level)
