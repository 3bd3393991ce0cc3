{{ config(materialized='table') }}

{{ lakehouse_patterns.wrapper(ref('visits_loaded'), {'is_home': "page = 'home'"}, layout='raw_struct') }}
