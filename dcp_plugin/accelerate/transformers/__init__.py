"""The door of ``transformers.Trainer``: ``class MyTrainer(DCPTrainerMixin, Trainer)``.

``trainer`` translates the Trainer's moments, ``content`` says what is in a checkpoint, ``folder`` looks after the
``checkpoint-N`` directories. transformers is imported by these modules and by nothing else of this package.
"""
