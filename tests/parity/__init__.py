"""The five systems that this project is modelled on, each as a use that has to work here."""
