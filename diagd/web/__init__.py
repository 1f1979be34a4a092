"""Pages served on this machine: play inside a world model (`diagd play`), and a blind study."""
