"""One step of each optimizer rule, worked out by hand from its published form in small numbers.

Every element of `p`, `g` and the states has the same value, so a case holds for any shape.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """p_after = p_before updated by g; states: (before, after) of each moment, in the order of the operator."""

    name: str
    optimizer: str
    p: float
    g: float
    states: tuple[tuple[float, float], ...]
    p_after: float
    step: int = 1
    hyper: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.optimizer} {self.name}"


CASES = (
    # The buffer starts as the gradient, then m = 0.5 m + g.
    Case("first step", "momentum", 1.0, 4.0, ((0.0, 4.0),), 0.0, hyper=dict(beta1=0.5, lr=0.25)),
    Case("ignores a stale buffer at step 1", "momentum", 1.0, 4.0, ((8.0, 4.0),), 0.0, hyper=dict(beta1=0.5, lr=0.25)),
    Case("later step", "momentum", 2.0, 4.0, ((8.0, 8.0),), 0.0, 2, dict(beta1=0.5, lr=0.25)),
    # L2: g + 0.5 p = 5
    Case("decay", "momentum", 2.0, 4.0, ((0.0, 5.0),), 0.75, hyper=dict(beta1=0.5, lr=0.25, weight_decay=0.5)),
    Case("scaled gradient", "momentum", 2.0, 4.0, ((0.0, 2.0),), 1.5, hyper=dict(beta1=0.5, lr=0.25, gnorm_scale=0.5)),
    Case("decay", "lars", 2.0, 4.0, ((0.0, 5.0),), 0.75, hyper=dict(beta1=0.5, lr=0.25, weight_decay=0.5)),
    # v = 0.75 * 0 + 0.25 * 16 = 4
    Case("first step", "rmsprop", 1.0, 4.0, ((0.0, 4.0),), 0.5, hyper=dict(beta1=0.75, lr=0.25)),
    Case("eps", "rmsprop", 1.0, 4.0, ((0.0, 4.0),), 0.75, hyper=dict(beta1=0.75, lr=0.25, eps=2.0)),
    # g + 0.5 * 4 = 4
    Case("decay", "rmsprop", 4.0, 2.0, ((0.0, 4.0),), 3.5, hyper=dict(beta1=0.75, lr=0.25, weight_decay=0.5)),
    Case("first step", "adagrad", 1.0, 4.0, ((0.0, 16.0),), 0.75, hyper=dict(lr=0.25)),
    Case("later step", "adagrad", 1.0, 4.0, ((9.0, 25.0),), 0.5, 2, dict(lr=0.625)),
    Case("decay", "adagrad", 4.0, 2.0, ((0.0, 16.0),), 3.75, hyper=dict(lr=0.25, weight_decay=0.5)),
    # sign(0.5 m + 0.5 g); m = 0.75 m + 0.25 g
    Case("first step", "lion", 1.0, 4.0, ((0.0, 1.0),), 0.75, hyper=dict(beta1=0.5, beta2=0.75, lr=0.25)),
    Case("sign of the old momentum", "lion", 1.0, 4.0, ((-8.0, -5.0),), 1.25, 2, dict(beta1=0.5, beta2=0.75, lr=0.25)),
    Case("no gradient, no momentum", "lion", 1.0, 0.0, ((0.0, 0.0),), 1.0, hyper=dict(beta1=0.5, beta2=0.75, lr=0.25)),
    # Decoupled: 8 * (1 - 0.25 * 0.5) + 0.25. L2 would turn the sign: -2 + 0.5 * 8 > 0.
    Case(
        "decay",
        "lion",
        8.0,
        -2.0,
        ((0.0, -0.5),),
        7.25,
        hyper=dict(beta1=0.5, beta2=0.75, lr=0.25, weight_decay=0.5),
    ),
    # m = 2, v = 4, corrected by 1 - 0.5 and 1 - 0.75: 4 / sqrt(16)
    Case("first step", "adam", 1.0, 4.0, ((0.0, 2.0), (0.0, 4.0)), 0.75, hyper=dict(beta1=0.5, beta2=0.75, lr=0.25)),
    Case(
        "eps is added to the corrected root",
        "adam",
        1.0,
        4.0,
        ((0.0, 2.0), (0.0, 4.0)),
        0.875,
        hyper=dict(beta1=0.5, beta2=0.75, lr=0.25, eps=4.0),
    ),
    # m = 0.5 * 2 + 0.5 * 4 = 3, corrected by 0.75: 4; v = 0.75 * 4 + 0.25 * 16 = 7, corrected by 7 / 16: 16
    Case(
        "second step",
        "adam",
        1.0,
        4.0,
        ((2.0, 3.0), (4.0, 7.0)),
        0.75,
        2,
        dict(beta1=0.5, beta2=0.75, lr=0.25),
    ),
    # Decay of the old parameter: 1 * (1 - 0.25 * 2) - 0.25 = 0.25. After the update it would be 0.375.
    Case(
        "decay acts on the old parameter",
        "adam",
        1.0,
        4.0,
        ((0.0, 2.0), (0.0, 4.0)),
        0.25,
        hyper=dict(beta1=0.5, beta2=0.75, lr=0.25, weight_decay=2.0),
    ),
    Case(
        "decay acts on the old parameter",
        "lamb",
        1.0,
        4.0,
        ((0.0, 2.0), (0.0, 4.0)),
        0.25,
        hyper=dict(beta1=0.5, beta2=0.75, lr=0.25, weight_decay=2.0),
    ),
    # Fast 2 / 0.5 = 4, slow 0.125 * 4 = 0.5 uncorrected, weight 8: (4 + 4) / 4
    Case(
        "first step",
        "ademamix",
        1.0,
        4.0,
        ((0.0, 2.0), (0.0, 0.5), (0.0, 4.0)),
        0.5,
        hyper=dict(beta1=0.5, beta2=0.75, beta3=0.875, alpha=8.0, lr=0.25),
    ),
    Case(
        "decay acts on the old parameter",
        "ademamix",
        1.0,
        4.0,
        ((0.0, 2.0), (0.0, 0.5), (0.0, 4.0)),
        0.0,
        hyper=dict(beta1=0.5, beta2=0.75, beta3=0.875, alpha=8.0, lr=0.25, weight_decay=2.0),
    ),
)
