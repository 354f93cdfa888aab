"""Write the tensors that operations of the towers' program take, each in its form."""

import tensorflow as tf

from keras_dp.partition.building.constants import Constants, as_read
from keras_dp.partition.building.construction import Construction
from keras_dp.partition.building.exchanges import Exchanges
from keras_dp.partition.program.operands import EXCHANGES, PLACES, Form, Operand


class Forms:
    """Writes the operands of operations, from the instances so far.

    Args:
        construction: the state of the partitioned graph.
        exchanges: the exchanges between towers.
        constants: the tensors that are known while tracing.
    """

    def __init__(self, construction: Construction, exchanges: Exchanges, constants: Constants):
        self._exchanges, self._constants = exchanges, constants
        self._graph, self._propagation, self._feeds = construction.graph, construction.propagation, construction.feeds
        self._devices, self._instances = construction.devices, construction.instances

    def whole(self, operand: Operand, device: str | None = None) -> str:
        """Returns the name of an operand of home. A tensor that is known is written on the given device."""
        output = operand.output
        if operand.form is Form.GIVEN:
            return self._feeds.whole[output[0]]
        if operand.form is Form.KNOWN:
            return self._constants.write(output, self._feeds.batch_rows, device or self._graph.home, None)
        return self._exchanges.whole(operand) if operand.form in EXCHANGES else self._instances.at_home(output)

    def of_tower(self, operand: Operand, tower: int, device: str) -> str:
        """Returns the name of an operand of a tower.

        Args:
            operand: the operand.
            tower: the number of the tower.
            device: the device that needs the tensor: the tower's, or that of a table.
        """
        output = operand.output
        if operand.is_replicated:
            place = operand.place
            return self._instances.part(output, tower, place) if place else self._exchanges.whole(operand, tower)
        match operand.form:
            case Form.KNOWN:
                return self._constants.write(output, self._feeds.batch_rows, device, tower)
            case Form.KNOWN_OWN:
                return self._constants.write(output, self._feeds.rows[tower], device, tower)
            case Form.READ:
                return self._as_read(operand, tower, device)
            case Form.GIVEN_ROWS:
                return self._instances.part(output, tower)
            case Form.TOWERS | Form.SHAPES:
                return self._instances.part(output, tower, PLACES[operand.form])
            case Form.PART:
                whole = operand.parts[0]
                made_on = device if whole.is_replicated else self._graph.home
                return self._exchanges.share(output, self.of_tower(whole, tower, device), tower, made_on)
            case Form.CUT:
                return str(self._graph.once(("cut", output, operand.rows), lambda: self._cut(operand))[tower])
        return self.whole(operand)

    def _as_read(self, shape: Operand, tower: int, device: str) -> str:
        """Returns a shape in which some integers are read as the tower's own row counts."""
        rows, dtype, reading = self._feeds.rows[tower], self._propagation.static(shape.output).dtype, shape.reading
        assert reading is not None
        if not shape.parts:
            return self._constants.write_integers(reading, dtype, rows, device)
        entries = self._propagation.facts[shape.output].entries
        assert entries is not None
        is_read, read = as_read(entries, reading)
        inputs = [
            self._graph.constant(is_read, tf.bool, device),
            self._constants.write_integers(read, dtype, rows, device),
            self.of_tower(shape.parts[0], tower, device),
        ]
        return self._graph.add("SelectV2", inputs, device, f"{shape.output[0]}/read", tower, T=dtype)

    def _cut(self, operand: Operand) -> list[str]:
        """Returns each tower's rows of a whole tensor. A tower cuts by itself a tensor that is known, or that it has made."""
        whole, rows, count = operand.parts[0], operand.rows, len(self._devices)
        assert rows is not None
        if whole.form is Form.KNOWN or whole.is_replicated:
            wholes = [self.of_tower(whole, tower, device) for tower, device in enumerate(self._devices)]
            return self._exchanges.cut(operand.output, wholes, rows, self._devices)
        return self._exchanges.cut(operand.output, [self.whole(whole)] * count, rows, [self._graph.home] * count)
