"""What would happen: the real scheduler core against modelled executors, in simulated time.

    workload, traces      what is asked for, and when
        └─> simulation    arrivals, routing, failures, scaling: one heap of events
              ├─ fleet        the executors of each scheduler; requests move as in service
              │    └─ executor    one real `core.Scheduler`, and when its steps are over
              │         └─ roofline, calibration    how long a step takes
              └─ meter ─> report      what is measured

    baselines (buddy)     static batching and Orca, as the PagedAttention paper defines them,
                          on the same step times and with the same measures

The policy is never written again: blocks, order, admission, preemption and sharing are the
core's, placement and moving are `scheduler_svc.placement`'s. What is modelled is time, and
which tokens come out. Results are a function of the configuration and the requests alone.
See docs/simulator.md for the model and what it leaves out.
"""

from scheduler_svc.simulator.baselines import BaselineConfig, simulate_orca, simulate_static
from scheduler_svc.simulator.calibration import CalibrationError, LinearCost
from scheduler_svc.simulator.faults import Autoscale, Failures
from scheduler_svc.simulator.hardware import DEVICES, PAPER_SETUPS, Device, Setup
from scheduler_svc.simulator.models import MODELS, ModelShape
from scheduler_svc.simulator.report import KvUse, Report, RequestTable, Sample, Spread
from scheduler_svc.simulator.roofline import Roofline
from scheduler_svc.simulator.simulation import SimulationConfig, simulate
from scheduler_svc.simulator.work import StepCost, StepSeconds, StepWork
from scheduler_svc.simulator.workload import SimRequest, WorkloadError

__all__ = [
    "DEVICES",
    "MODELS",
    "PAPER_SETUPS",
    "Autoscale",
    "BaselineConfig",
    "CalibrationError",
    "Device",
    "Failures",
    "KvUse",
    "LinearCost",
    "ModelShape",
    "Report",
    "RequestTable",
    "Roofline",
    "Sample",
    "Setup",
    "SimRequest",
    "SimulationConfig",
    "Spread",
    "StepCost",
    "StepSeconds",
    "StepWork",
    "WorkloadError",
    "simulate",
    "simulate_orca",
    "simulate_static",
]
