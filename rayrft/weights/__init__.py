"""Weight transfer between trainer and engines. Importing it registers the transports, and needs no torch."""

from rayrft.weights import broadcast, files, ipc  # noqa: F401  (in the order in which `auto` asks them)
from rayrft.weights.messages import Parcel
from rayrft.weights.transport import Endpoint, Layout, WeightTransport, choose_transport, register_transport, transports

__all__ = ["Endpoint", "Layout", "Parcel", "WeightTransport", "choose_transport", "register_transport", "transports"]
