"""Train with distillation, teachers, and other variants of the step: mixing, clipping, accumulation, two passes."""

import keras
import tensorflow as tf
from keras import ops

from programs.catalogue import CLASSES, FEATURES, TARGETS, integers, mlp, normal, program
from programs.steps import Learner, adam, dense, descend, descends, fits, follow, mean_square


@program
def knowledge_distillation():
    """Trains a student on labels and on a frozen teacher's softened answers, by two losses that are given to compile."""

    class Distiller(keras.Model):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = mlp(5, 4, 3, normalized=True), mlp(5, 8, 3)

        def compile(self, student_loss, distillation_loss, temperature, **arguments):
            super().compile(**arguments)
            self.student_loss, self.distillation_loss, self.temperature = student_loss, distillation_loss, temperature

        def call(self, x, training=False):
            return self.student(x, training=training)

        def train_step(self, data):
            x, y = data
            wanted = ops.softmax(self.teacher(x, training=False) / self.temperature)
            with tf.GradientTape() as tape:
                answers = self.student(x, training=True)
                by_labels = self.student_loss(y, answers)
                by_teacher = self.distillation_loss(wanted, ops.softmax(answers / self.temperature)) * self.temperature**2
                loss = 0.1 * by_labels + 0.9 * by_teacher
            descend(self.optimizer, tape, loss, self.student.trainable_variables)
            return {**self.compute_metrics(x, y, answers), "by_labels": by_labels, "by_teacher": by_teacher}

        def test_step(self, data):
            x, y = data
            answers = self.student(x, training=False)
            return {**self.compute_metrics(x, y, answers), "by_labels": self.student_loss(y, answers)}

    arguments = {
        "student_loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "distillation_loss": keras.losses.KLDivergence(),
        "temperature": 3.0,
        "metrics": ["sparse_categorical_accuracy"],
    }
    return Distiller, fits(y=CLASSES, optimizer=adam, evaluates=True, predicts=True, **arguments)


@program
def mean_teacher():
    """Trains a student to agree with a moving average of itself, each with its own noise."""

    class MeanTeacher(keras.Model):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = (mlp(5, 4, 1, normalized=True) for _ in range(2))
            self.teacher.set_weights(self.student.get_weights())
            self.teacher.trainable = False
            self.noise = keras.layers.GaussianNoise(0.2, seed=11)

        def train_step(self, data):
            x, y = data
            target = self.teacher(self.noise(x, training=True), training=True)
            with tf.GradientTape() as tape:
                answer = self.student(self.noise(x, training=True), training=True)
                supervised = ops.mean(ops.square(y - answer))
                consistency = ops.mean(ops.square(answer - target))
                loss = supervised + 0.5 * consistency
            descend(self.optimizer, tape, loss, self.student.trainable_variables)
            follow(self.teacher, self.student)
            return {"supervised": supervised, "consistency": consistency}

    return MeanTeacher, fits()


@descends
def mixup(self, x, y):
    """Mixes every row with one of a shuffled copy of the batch, by weights drawn from a beta distribution."""
    order = keras.random.shuffle(ops.arange(ops.shape(x)[0]), seed=self.seed)
    share = keras.random.beta((ops.shape(x)[0], 1), 0.4, 0.4, seed=self.seed)
    x = share * x + (1 - share) * ops.take(x, order, axis=0)
    y = share * y + (1 - share) * ops.take(y, order, axis=0)
    return mean_square(y, self(x, training=True)), {}


@program
def sharpness_aware():
    """Climbs to the worst weights nearby, takes the gradient there, and applies it to the original weights (SAM)."""

    class SharpnessAware(keras.Model):
        def train_step(self, data):
            x, y = data
            variables = self.trainable_variables
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, variables)
            norm = tf.linalg.global_norm(gradients)
            steps = [0.05 * gradient / (norm + 1e-12) for gradient in gradients]
            for variable, step in zip(variables, steps, strict=True):
                variable.assign_add(step)
            with tf.GradientTape() as tape:
                sharp = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(sharp, variables)
            for variable, step in zip(variables, steps, strict=True):
                variable.assign_sub(step)
            self.optimizer.apply(gradients, variables)
            return {**self.compute_metrics(x, y, self(x, training=False)), "loss": loss, "sharpness": sharp - loss}

    return dense(SharpnessAware), fits(loss="mse", metrics=["mae"])


@program
def accumulation_by_hand():
    """Adds up gradients in variables of its own and applies them in every second step, in a tf.cond."""

    class Accumulating(Learner, keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.turn = self.add_weight(name="turn", dtype="int32", initializer="zeros", trainable=False)
            self.sums = [keras.Variable(tf.zeros(weight.shape), trainable=False) for weight in self.trainable_variables]

        def apply_sums(self):
            self.optimizer.apply([total / 2.0 for total in self.sums], self.trainable_variables)
            for total in self.sums:
                total.assign(ops.zeros_like(total))
            return True

        def train_step(self, data):
            x, y = data
            self.turn.assign_add(1)
            with tf.GradientTape() as tape:
                loss = mean_square(y, self(x, training=True))
            for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
                total.assign_add(gradient)
            applied = tf.cond(tf.equal(self.turn % 2, 0), self.apply_sums, lambda: False)
            return {"loss": loss, "applied": tf.cast(applied, "float64")}

    return dense(Accumulating), fits(builds=True)


@program
def gradient_surgery():
    """Projects the gradients of two losses so that they do not oppose each other (PCGrad)."""

    class Surgery(keras.Model):
        def train_step(self, data):
            x, y = data
            variables = self.trainable_variables
            with tf.GradientTape(persistent=True) as tape:
                answers = self(x, training=True)
                first, second = ops.mean(ops.square(y - answers)), ops.mean(ops.abs(y + answers))
            merged, conflicts = [], 0.0
            for one, other in zip(tape.gradient(first, variables), tape.gradient(second, variables), strict=True):
                dot = ops.sum(one * other)
                merged.append(ops.where(dot < 0, one - dot / (ops.sum(other**2) + 1e-9) * other, one) + other)
                conflicts += tf.cast(dot < 0, "float64")
            self.optimizer.apply(merged, variables)
            return {"first": first, "second": second, "conflicts": conflicts}

    return dense(Surgery), fits()


@program
def meta_learning():
    """Takes an inner step on support rows, and learns from query rows by a gradient of its gradient (MAML)."""

    class Meta(Learner, keras.Model):
        def loss_of(self, data):
            support, wanted, query, answers = data
            head = self.layers[-1]
            with tf.GradientTape() as tape:
                loss = mean_square(wanted, self(support, training=True))
            by_kernel, by_bias = tape.gradient(loss, [head.kernel.value, head.bias.value])
            adapted = ops.matmul(self.layers[1](query), head.kernel - 0.1 * by_kernel) + head.bias - 0.1 * by_bias
            return mean_square(answers, adapted), {}

    data = (normal(13, 5, seed=13), normal(13, 1, seed=14), FEATURES, TARGETS)
    return dense(Meta, normalized=False), fits(data, None, optimizer=adam)


@program
def meta_learning_by_task():
    """Adapts to each row, which is a task with its own examples, separately in a tf.vectorized_map."""

    class MetaByTask(Learner, keras.Model):
        def __init__(self):
            super().__init__()
            self.kernel = self.add_weight(name="kernel", shape=(3, 1), initializer="glorot_uniform")

        def loss_of_task(self, task):
            examples, wanted = task
            kernel = self.kernel.value
            error = tf.matmul(examples[:2], kernel) - wanted[:2]
            adapted = kernel - 0.1 * tf.matmul(examples[:2], error, transpose_a=True)
            return tf.reduce_mean(tf.square(tf.matmul(examples[2:], adapted) - wanted[2:]))

        def loss_of(self, *data):
            losses = tf.vectorized_map(self.loss_of_task, data)
            return tf.reduce_mean(losses), {"worst": tf.reduce_max(losses)}

    return MetaByTask, fits(normal(13, 4, 3, seed=15), normal(13, 4, 1, seed=16), optimizer=adam)


@program
def loss_scaling_by_hand():
    """Scales the loss up and the gradients down; skips steps with non-finite gradients, and reduces the scale."""

    class Scaling(Learner, keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.exponent = self.add_weight(name="exponent", initializer=keras.initializers.Constant(310.0), trainable=False)

        def train_step(self, data):
            x, y = data
            scale = tf.pow(tf.constant(10.0, "float64"), self.exponent.value)
            with tf.GradientTape() as tape:
                loss = mean_square(y, self(x, training=True))
                scaled = loss * scale
            gradients = tape.gradient(scaled, self.trainable_variables)
            finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])
            gradients = [tf.where(finite, gradient / scale, tf.zeros_like(gradient)) for gradient in gradients]
            self.optimizer.apply(gradients, self.trainable_variables)
            self.exponent.assign_sub(tf.where(finite, 0.0, 20.0))
            return {"fit": loss, "finite": tf.cast(finite, "float64"), "exponent": self.exponent}

    return dense(Scaling), fits()


@program
def test_step_of_its_own():
    """Trains as Keras does, and evaluates by a custom test_step that averages answers over noisy copies of each row."""

    class Averaging(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.random = keras.random.SeedGenerator(17)

        def test_step(self, data):
            x, y = data
            copies = ops.repeat(x, 3, axis=0)
            copies += 0.1 * keras.random.normal(ops.shape(copies), seed=self.random)
            answers = ops.mean(ops.reshape(self(copies, training=False), (-1, 3, 1)), axis=1)
            return {"error": ops.mean(ops.square(y - answers)), **self.compute_metrics(x, y, answers)}

    return dense(Averaging), fits(loss="mse", metrics=["mae"], evaluates=True, predicts=True)


@program
def predict_step_of_its_own():
    """Trains by a custom step, and predicts a dict of answers, their ranks within the batch, and a nested pair."""

    class Predicting(Learner, keras.Model):
        def loss_of(self, x, y, sample_weight=None):
            return mean_square(y, self(x, training=True)), {}

        def predict_step(self, data):
            x = data[0] if isinstance(data, tuple) else data
            answers = self(x, training=False)
            return {"answers": answers, "ranks": ops.argsort(answers, axis=0), "pair": (answers**2, x - ops.mean(x, axis=0))}

    def script(model):
        model.compile(optimizer=adam())
        logs = [model.train_on_batch(FEATURES[:rows], TARGETS[:rows], return_dict=True) for rows in (5, 7, 1)]
        return logs, model.predict(FEATURES, batch_size=5, verbose=0), model.predict_on_batch(FEATURES[:4])

    return dense(Predicting), script


@program
def sparse_gradients():
    """Trains an embedding, and logs the global norm of all gradients, one of which is sparse."""

    class Sparse(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = mean_square(y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            norm = tf.linalg.global_norm([tf.convert_to_tensor(gradient) for gradient in gradients])
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss, "norm": norm}

    def build():
        inputs = keras.Input((4,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(9, 3)(inputs))
        return Sparse(inputs, keras.layers.Dense(1)(hidden))

    return build, fits(integers(9, 13, 4, seed=20), optimizer=lambda: keras.optimizers.Adagrad(0.1))
