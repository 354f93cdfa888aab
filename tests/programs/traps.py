"""Train by steps that go wrong if a tower treats its slice as the whole batch: rows meet, order matters, state hides."""

import functools

import keras
import tensorflow as tf
from keras import ops

from programs.catalogue import CLASSES, TARGETS, integers, mlp, normal, program
from programs.steps import Learner, adam, dense, descend, descends, fits, mean_square, rows_of


def steps(train_step):
    """Registers a program of a step."""
    build = dense(type(train_step.__name__, (keras.Model,), {"train_step": train_step}))
    return program(functools.wraps(train_step)(lambda: (build, fits())))


def learns(loss_of_answers):
    """Registers a program whose step descends along a loss of (model, x, y, answers)."""

    @functools.wraps(loss_of_answers)
    def loss_of(self, x, y):
        return loss_of_answers(self, x, y, self(x, training=True)), {"rows": rows_of(x)}

    return descends(loss_of)


@learns
def median_of_rows(model, x, y, answers):
    """Trains on the median error and a variance over the rows, by sorting them."""
    errors = tf.sort(tf.abs(y - answers)[:, 0])
    return errors[tf.shape(errors)[0] // 2] + tf.math.reduce_variance(answers)


@learns
def masked_rows(model, x, y, answers):
    """Trains on the rows that tf.boolean_mask keeps, whose number depends on the data."""
    keep = y[:, 0] > -0.5
    return tf.reduce_mean(tf.boolean_mask(tf.square(y - answers), keep)) + tf.reduce_sum(answers[~keep] ** 2) / 9.0


@learns
def found_rows(model, x, y, answers):
    """Trains on rows that tf.where finds, gathered by their indices and scattered back."""
    found = tf.where(y[:, 0] > -0.5)
    errors = tf.gather_nd(tf.square(y - answers), found)
    back = tf.scatter_nd(found, errors, tf.shape(y, out_type="int64"))
    return tf.reduce_mean(back)


@program
def tape_in_a_branch():
    """Opens the tape, descends and counts in a branch of a tf.cond that only some batches take."""

    class Branching(keras.Model):
        def train_step(self, data):
            x, y = data

            def descends():
                with tf.GradientTape() as tape:
                    loss = mean_square(y, self(x, training=True))
                descend(self.optimizer, tape, loss, self.trainable_variables)
                return loss, tf.constant(1.0, "float64")

            def rests():
                return mean_square(y, self(x, training=False)), tf.constant(0.0, "float64")

            loss, taken = tf.cond(tf.reduce_mean(y) > -0.2, descends, rests)
            return {"loss": loss, "taken": taken}

    return dense(Branching), fits(builds=True)


@steps
def jacobian_of_losses(self, data):
    """Takes the Jacobian of two losses of the batch at once and applies the sum of its rows."""
    x, y = data
    with tf.GradientTape() as tape:
        errors = y - self(x, training=True)
        losses = tf.stack([tf.reduce_mean(errors**2), tf.reduce_mean(tf.abs(errors))])
    jacobian = tape.jacobian(losses, self.trainable_variables)
    self.optimizer.apply([tf.reduce_sum(part, axis=0) for part in jacobian], self.trainable_variables)
    return {"squares": losses[0], "distances": losses[1]}


@steps
def gradients_by_row(self, data):
    """Clips the gradient of each row, from a Jacobian with a row for each row of the batch (DP-SGD without noise)."""
    x, y = data
    head = self.layers[-1].trainable_variables
    with tf.GradientTape() as tape:
        losses = tf.reduce_sum(tf.square(y - self(x, training=False)), axis=1)
    by_kernel, by_bias = tape.jacobian(losses, head)
    lengths = tf.sqrt(tf.reduce_sum(by_kernel**2, axis=[1, 2]) + tf.reduce_sum(by_bias**2, axis=1))
    factors = tf.minimum(0.5 / lengths, 1.0)
    clipped = by_kernel * factors[:, None, None], by_bias * factors[:, None]
    self.optimizer.apply([tf.reduce_mean(gradients, axis=0) for gradients in clipped], head)
    return {"longest": tf.reduce_max(lengths), "clipped": tf.reduce_sum(tf.cast(factors < 1, "float64"))}


@learns
def jacobian_by_inputs(model, x, y, answers):
    """Penalizes the Jacobian of each row's answers by its inputs, with tape.batch_jacobian."""
    with tf.GradientTape() as inner:
        inner.watch(x)
        again = model(x, training=False)
    return mean_square(y, answers) + 0.1 * tf.reduce_mean(inner.batch_jacobian(again, x) ** 2)


@learns
def shuffled_rows(model, x, y, answers):
    """Compares each row with another row of the batch, shuffled by tf.random.shuffle with a seed."""
    order = tf.random.shuffle(tf.range(tf.shape(x)[0]), seed=21)
    partners = tf.gather(answers, order)
    return mean_square(y, answers) + tf.reduce_mean(tf.abs(answers - partners))


@descends
def reversed_and_rolled_rows(self, x, y):
    """Mixes each row with the row at the opposite place of the batch, and with its neighbor."""
    x = 0.6 * x + 0.3 * x[::-1] + 0.1 * tf.roll(x, 1, axis=0)
    return mean_square(y, self(x, training=True)), {}


@program
def counters():
    """Counts rows and steps, remembers the largest input and a moving center, in weights that are assigned in the step."""

    class Counting(Learner, keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.rows = self.add_weight(name="rows", dtype="int64", initializer="zeros", trainable=False)
            self.largest = self.add_weight(name="largest", initializer="zeros", trainable=False)
            self.center = self.add_weight(name="center", shape=(5,), initializer="zeros", trainable=False)

        def loss_of(self, x, y):
            self.rows.assign_add(tf.shape(x, out_type="int64")[0])
            self.largest.assign(ops.maximum(self.largest, ops.max(x)))
            self.center.assign(0.9 * self.center + 0.1 * ops.mean(x, axis=0))
            loss = mean_square(y, self(x - self.center, training=True))
            return loss, {"rows": self.rows, "largest": self.largest}

    return dense(Counting), fits(evaluates=True, predicts=True, loss="mse")


@program
def raw_variables():
    """Keeps state in a tf.Variable that Keras does not track, and descends by assign_sub to variables and to their values."""

    class Raw(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.steps = tf.Variable(0, dtype="int64", trainable=False)
            self.gain = tf.Variable(tf.ones((1,), "float64"))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = mean_square(y, self.gain * self(x, training=True))
            variables = [self.gain, *self.trainable_variables]
            for i, (variable, gradient) in enumerate(zip(variables, tape.gradient(loss, variables), strict=True)):
                (variable.value if i % 2 else variable).assign_sub(0.05 * gradient)
            return {"loss": loss, "steps": self.steps.assign_add(1)}

    return dense(Raw), fits(report=lambda model: [model.steps.numpy(), model.gain.numpy()])


@steps
def steps_in_a_loop(self, data):
    """Descends several times in a tf.while_loop, until the batch is fitted or three steps are done."""
    x, y = data

    def descends(i, _):
        with tf.GradientTape() as tape:
            loss = mean_square(y, self(x, training=True))
        for variable, gradient in zip(self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True):
            variable.assign_sub(0.05 * gradient)
        return i + 1, loss

    begin = tf.constant(0), tf.constant(9.0, "float64")
    steps, loss = tf.while_loop(lambda i, loss: (i < 3) & (loss > 0.6), descends, begin)
    return {"loss": loss, "steps": tf.cast(steps, "float64")}


@descends
def perturbed_in_a_loop(self, x, y):
    """Moves the inputs along their gradient in a tf.while_loop, and trains on the result (PGD)."""

    def climbs(i, moved):
        with tf.GradientTape() as inner:
            inner.watch(moved)
            loss = mean_square(y, self(moved, training=False))
        return i + 1, moved + tf.clip_by_value(inner.gradient(loss, moved), -0.1, 0.1)

    _, moved = tf.while_loop(lambda i, moved: i < 3, climbs, (tf.constant(0), x))
    return mean_square(y, self(tf.stop_gradient(moved), training=True)), {"moved": tf.norm(moved - x)}


@learns
def loop_over_rows(model, x, y, answers):
    """Carries a state from row to row with tf.scan, and maps rows one by one with tf.map_fn."""
    errors = (y - answers)[:, 0]
    carried = tf.scan(lambda state, error: 0.5 * state + error, errors, tf.zeros((), "float64"))
    mapped = tf.map_fn(lambda error: tf.math.softplus(error), errors)
    return tf.reduce_mean(carried**2) + tf.reduce_mean(mapped)


@program
def users_by_items():
    """Multiplies the users of a batch by its items over two axes, rows with rows, by tf.tensordot and tf.einsum."""

    class Towers(Learner, keras.Model):
        def __init__(self):
            super().__init__()
            self.users, self.items = mlp(5, 6), mlp(4, 6)

        def loss_of(self, users, items):
            users = tf.reshape(self.users(users, training=True), (-1, 2, 3))
            items = tf.reshape(self.items(items, training=True), (-1, 2, 3))
            scores = tf.tensordot(users, tf.transpose(items, (1, 2, 0)), 2)
            diagonal = tf.linalg.diag_part(scores)
            crossed = tf.einsum("iab,jab->ij", users, items)
            loss = tf.reduce_mean(tf.math.softplus(scores - diagonal[:, None])) + 0.1 * tf.reduce_mean(crossed**2)
            return loss, {"first": scores[0, -1]}

    return Towers, fits(y=normal(13, 4, seed=22))


@learns
def sum_over_both_axes(model, x, y, answers):
    """Contracts two batches over their rows and features at once, tensordot(users, items, 2), to one number."""
    users, items = answers * x, tf.sin(x)
    return mean_square(y, answers) + 0.01 * tf.tensordot(users, items, 2) ** 2


@program
def coupled_activity():
    """Regularizes a layer's activity by the correlations of its units over the rows, in Keras's own step."""

    @keras.saving.register_keras_serializable("programs")
    class Decorrelation(keras.regularizers.Regularizer):
        def __call__(self, activity):
            centered = activity - ops.mean(activity, axis=0)
            products = ops.matmul(ops.transpose(centered), centered) / ops.cast(ops.shape(activity)[0], activity.dtype)
            return 0.1 * ops.sum(ops.square(products * (1.0 - ops.eye(4, dtype=activity.dtype))))

    def build():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(4, activation="tanh", activity_regularizer=Decorrelation())(inputs)
        return keras.Model(inputs, keras.layers.Dense(1, kernel_regularizer="l2")(hidden))

    return build, fits(loss="mse", metrics=["mae"], evaluates=True, predicts=True)


@program
def layers_in_the_loss():
    """Calls layers only inside compute_loss: a head with batch normalization and dropout."""

    class Headed(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.head = mlp(1, 3, 2, normalized=True)
            self.dropout = keras.layers.Dropout(0.3, seed=23)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            projected = self.dropout(self.head(y_pred, training=training), training=training)
            return ops.mean(ops.square(y - y_pred)) + 0.3 * ops.mean(ops.square(projected - ops.mean(projected, axis=0)))

    return dense(Headed), fits(metrics=["mae"], optimizer=adam, evaluates=True)


@learns
def cumulative_sums(model, x, y, answers):
    """Trains on cumulative sums and products over the rows, and on differences of neighbors."""
    sums = tf.cumsum(y - answers, axis=0, exclusive=True)
    products = tf.math.cumprod(tf.tanh(answers), axis=0, reverse=True)
    neighbors = answers[1:] - answers[:-1]
    return tf.reduce_mean(sums**2) + tf.reduce_mean(products) + 0.1 * tf.reduce_sum(neighbors**2)


@learns
def hardest_rows(model, x, y, answers):
    """Trains on the three rows with the largest errors, found by tf.math.top_k."""
    worst, places = tf.math.top_k(tf.square(y - answers)[:, 0], k=3)
    return tf.reduce_mean(worst) + 0.1 * tf.reduce_mean(tf.gather(answers, places) ** 2)


@learns
def sorted_rows(model, x, y, answers):
    """Trains on the sorted answers against the sorted targets, as the Wasserstein distance does, and on ranks."""
    order = tf.argsort(y[:, 0], direction="DESCENDING", stable=True)
    distance = tf.reduce_mean(tf.abs(tf.sort(answers, axis=0) - tf.sort(y, axis=0)))
    ranked = tf.gather(answers, order)[:, 0]
    weights = 1.0 / tf.math.log(2.0 + tf.range(rows_of(x)))
    return distance - 0.1 * tf.reduce_sum(ranked * weights)


@descends
def joined_and_split(self, x, y):
    """Joins real and made rows for one call with batch normalization, and splits the answers in the middle."""
    made = tf.reverse(x, [1]) + 0.1
    real, fake = tf.split(self(tf.concat([x, made], axis=0), training=True), 2)
    also = self(tf.stack([x, made])[1], training=True)[: tf.shape(y)[0]]
    loss = tf.reduce_mean(tf.math.softplus(-real)) + tf.reduce_mean(tf.math.softplus(fake)) + tf.reduce_mean(also**2)
    return loss, {"real": tf.reduce_mean(real), "right": tf.reduce_mean(tf.cast(real > fake, "float64"))}


@learns
def constant_rows(model, x, y, answers):
    """Joins the batch with constant rows, and calls the model on a fixed number of constant rows and of drawn rows."""
    own = normal(7, 5, seed=1)
    also = 0.1 * tf.reduce_mean(model(own) + model(tf.random.stateless_normal((7, 5), [1, 2], dtype="float64")))
    joined = tf.concat([x, tf.ones((4, 5), "float64")], axis=0)
    return mean_square(y, answers) + tf.reduce_mean(model(joined) ** 2) + also


@program
def generator_of_random_numbers():
    """Draws noise from a tf.random.Generator that the model keeps, and from the seed of keras.utils.set_random_seed."""

    class Generating(Learner, keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.generator = tf.random.Generator.from_seed(26)

        def loss_of(self, x, y):
            x += 0.1 * self.generator.normal(tf.shape(x), dtype="float64")
            y += 0.1 * tf.random.normal(tf.shape(y), dtype="float64")
            return mean_square(y, self(x, training=True)), {"rows": rows_of(x)}

    return dense(Generating), fits(report=lambda model: model.generator.state.numpy().astype("float64"))


@steps
def rate_set_in_the_step(self, data):
    """Sets the learning rate inside the step, from the loss of the batch and the count of steps."""
    x, y = data
    with tf.GradientTape() as tape:
        loss = mean_square(y, self(x, training=True))
    warm = tf.minimum(tf.constant(1.0, "float64"), (tf.cast(self.optimizer.iterations, "float64") + 1.0) / 4.0)
    self.optimizer.learning_rate.assign(0.05 * warm / (1.0 + loss))
    descend(self.optimizer, tape, loss, self.trainable_variables)
    return {"loss": loss, "rate": self.optimizer.learning_rate}


@program
def function_in_the_step():
    """Calls a tf.function with a branch and a loop in Python inside a step that is also a tf.function."""

    class Decorated(keras.Model):
        @tf.function
        def penalty(self, answers):
            total = tf.zeros((), "float64")
            for i in tf.range(3):
                total += tf.reduce_mean(answers ** tf.cast(i, "float64"))
            if total > 2.0:
                total = tf.sqrt(total)
            return total

        @tf.function
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                answers = self(x, training=True)
                loss = tf.reduce_mean(tf.square(y - answers)) + 0.1 * self.penalty(answers)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))  # noqa: B905
            return {"loss": loss, "rows": rows_of(x)}

    return dense(Decorated), fits()


@program
def gradient_of_its_own():
    """Reverses the gradient of one of two heads by a tf.custom_gradient (domain adversarial training)."""

    @tf.custom_gradient
    def reverse(x):
        return tf.identity(x), lambda upstream: -0.5 * upstream

    class Domains(Learner, keras.Model):
        def __init__(self):
            super().__init__()
            self.trunk, self.answers, self.domains = mlp(5, 4, 3, normalized=True), mlp(3, 1), mlp(3, 3, 1)

        def loss_of(self, x, targets):
            y, domain = targets
            hidden = self.trunk(x, training=True)
            logits = self.domains(reverse(hidden), training=True)[:, 0]
            by_answers = mean_square(y, self.answers(hidden, training=True))
            by_domains = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(domain, logits))
            return by_answers + by_domains, {"answers": by_answers, "domains": by_domains}

    return Domains, fits(y=(TARGETS, integers(2, 13, seed=27).astype("float64")))


@functools.partial(descends, y=CLASSES)
def rows_by_class(self, x, y):
    """Averages the rows of each class with tf.math.unsorted_segment_mean, and pulls each row to the center of its class."""
    hidden = self.layers[1](x)
    centers = tf.math.unsorted_segment_mean(hidden, y, 3)
    apart = tf.reduce_sum(tf.square(centers[:, None] - centers[None]))
    together = tf.reduce_mean(tf.square(hidden - tf.gather(centers, y)))
    counts = tf.math.bincount(tf.cast(y, "int32"), minlength=3, maxlength=3)
    loss = together - 0.01 * apart + 0.1 * tf.reduce_mean(tf.square(self(x, training=True)))
    return loss, {"fewest": tf.reduce_min(counts)}


@descends
def whitened_batch(self, x, y):
    """Whitens the batch by a Cholesky factor of its covariance, as decorrelated batch normalization does."""
    hidden = self.layers[1](x)
    centered = hidden - tf.reduce_mean(hidden, axis=0)
    covariance = tf.matmul(centered, centered, transpose_a=True) / rows_of(x) + 0.1 * tf.eye(4, dtype="float64")
    white = tf.transpose(tf.linalg.triangular_solve(tf.linalg.cholesky(covariance), tf.transpose(centered)))
    answers = self.layers[-1](self.layers[2](white, training=True))
    return mean_square(y, answers) - 0.01 * tf.linalg.logdet(covariance), {"rows": rows_of(x)}


@program
def built_in_the_first_step():
    """Builds its layers, and the state of its metrics, in the first step, which is its first call."""

    class Late(Learner, keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(4, activation="tanh")
            self.normalization, self.head = keras.layers.BatchNormalization(), keras.layers.Dense(1)
            self.score = keras.metrics.R2Score(name="r2")

        def call(self, x, training=False):
            return self.head(self.normalization(self.hidden(x), training=training))

        def loss_of(self, x, y):
            answers = self(x, training=True)
            self.score.update_state(y, answers)
            return mean_square(y, answers), {"r2": self.score.result()}

    return Late, fits(optimizer=adam, predicts=True)
