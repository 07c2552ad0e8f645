"""Tasks, experiences and the Buffer that holds them between Explorer and Trainer."""
