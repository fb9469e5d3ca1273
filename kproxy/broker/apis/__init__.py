"""The APIs: each file opens with its APIs' versions and behaviour; `registry` lists them all."""
